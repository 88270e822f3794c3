"""What many tests build: tables, collections, batches and optimizers. What is special to one test stays beside it."""
