"""What has to be checked and measured on a GPU, part by part, and the document that says how it went."""
