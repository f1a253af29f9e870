"""Methods that change the distribution so as to be faster."""
