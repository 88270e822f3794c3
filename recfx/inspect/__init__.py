"""What was, or would be, done to a model: the conversion report; pictures, costs, and what indexes have counted."""
