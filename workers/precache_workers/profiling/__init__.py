"""Times of rows, ops and stages, and the estimates made of them."""
