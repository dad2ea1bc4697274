"""Makes the micro OuteTTS: a small Llama and DAC of the real classes, for tests and recipes/outetts-micro.yaml."""
