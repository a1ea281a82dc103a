// Compiled by nobody: its target tells which folders a file that includes penstock is compiled with.
