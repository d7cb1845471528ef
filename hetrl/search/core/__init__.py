"""The compiled core: what Python and C++ share, and the functions that are called."""
