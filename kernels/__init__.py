"""One file per semantic op: its plain-torch reference, its fast versions, and the registry that chooses among them."""
