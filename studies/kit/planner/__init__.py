"""A model of passes on machines that nobody rented: which drafter would pay."""
