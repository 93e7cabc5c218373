"""Tensors whose rows are cut unevenly: every ordinary torch call is right, or refused on all ranks."""
