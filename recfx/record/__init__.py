"""What a converted model remembers of its conversion: plain data, copied and pickled with the model."""
