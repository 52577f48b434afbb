"""Key-addressed stores below host memory. Adding one is one file and one test class."""
