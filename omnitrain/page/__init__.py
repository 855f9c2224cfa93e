"""The look of pages and of what notebooks show: pieces of HTML, the style sheet, vector pictures."""
