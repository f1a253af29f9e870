"""The demonstration page: what a visitor may ask, how it is decoded, and how the page looks."""
