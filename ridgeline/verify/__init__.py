"""The same training in two layouts, compared tensor by tensor."""
