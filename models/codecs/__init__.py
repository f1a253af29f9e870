"""Codecs, which turn images into codes and back, and tables of the codes nearest to each code."""
