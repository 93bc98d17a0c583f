"""The commands of `isaac-newton`; what takes seconds to import is imported when a command runs."""
