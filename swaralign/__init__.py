"""swaralign: preference optimisation for text-to-speech language models, as reproducible artifacts."""
