"""The contract check of a foundation: what it must honour so that training it is exact, measured before training."""
