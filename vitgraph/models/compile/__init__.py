"""What compiled blocks get beyond torch's own choices."""
