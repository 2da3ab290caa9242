"""One module per data set, what they share (`base`), and the command that fetches them (`prepare`)."""
