"""Names as they can be printed, tables of text, and pages of HTML. It imports no torch."""
