"""What a converted model records about its conversion: plain data, copied and pickled with the model."""
