"""What was, or would be, done to a model: the conversion report; its pictures, its cost, and a monitor."""
