"""Small faults put into the product code, one at a time: the tests have to notice each of them (``make mutants``)."""
