"""Training: data, losses, features, and the loop that every recipe shares."""
