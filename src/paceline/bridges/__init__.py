"""What other engines can borrow: drafters that read tokens alone, and trained heads in the layouts that they load."""
