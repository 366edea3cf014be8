"""Trained heads in the layouts that other engines load."""
