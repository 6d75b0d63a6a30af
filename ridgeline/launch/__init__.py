"""Starting ranks and telling each who it is. Imports without torch."""
