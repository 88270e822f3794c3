"""Pictures of a model's graphs: what they show, and the formats that they are written in."""
