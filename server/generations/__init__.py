"""Moving a server between generations, serving a challenger beside the champion, and guarding their files."""
