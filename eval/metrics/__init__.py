"""What images are judged by: formulas, feature networks over published weights, pairing with prompts."""
