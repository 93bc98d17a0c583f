"""One HTML page of everything the records say, that needs no network: `isaac-newton report`."""
