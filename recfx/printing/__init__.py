"""Tables of text, and pages of HTML. It imports no torch."""
