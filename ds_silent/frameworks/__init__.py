"""The adapters: what each framework answers, where its hooks are, and the ways in. A folder for each large one."""
