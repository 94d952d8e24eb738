"""The pictures of a run, one file per kind. matplotlib is imported inside the functions that draw."""
