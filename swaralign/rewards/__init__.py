"""What a take is worth: `score.Scorer` decides it, for training, validation and evaluation alike."""
