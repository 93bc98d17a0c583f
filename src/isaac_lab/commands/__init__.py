"""The commands of `isaac-newton`, one file each; what takes seconds to import is imported when a command runs."""
