"""Quality metrics of images: networks with published weights, scores of their features, and scores.jsonl."""
