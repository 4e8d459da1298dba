"""Other libraries' calling conventions, and arrays that are not torch tensors."""
