"""The words all other floors speak. Imports nothing of ours, and no torch at run time."""
