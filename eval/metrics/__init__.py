"""Quality metrics of images: networks with published weights, scores of their features, the record."""
