"""Starting the processes of a run, and what each of them does with its output and its errors."""
