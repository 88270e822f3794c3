"""Running a training so that communication and hashing of the next batch overlap with this one's step."""
