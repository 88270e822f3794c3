"""The modules that the nodes of an exported graph call: each compiles under TorchScript, and holds what it needs.

They read tensors only: no tables, indexes or optimizers of the model that is being exported. Class attributes are
annotated without postponed evaluation, because TorchScript reads the annotations of empty lists.
"""
