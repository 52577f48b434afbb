"""The tests; a package, so that their rigs have one name everywhere."""
