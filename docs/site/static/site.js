// A page opened from the disk may not read other files, so results are listed there without an excerpt of each page.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
