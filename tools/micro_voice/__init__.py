"""How the files of data/demo were made: train_voice, make_corpus, measure. README.md has the commands."""
