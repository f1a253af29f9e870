"""Groups of options that bench and generate_images share."""
