"""Parts of the study of Mirror."""
