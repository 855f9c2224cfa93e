"""Order the samples of a step so that ranks which wait for features of other ranks wait as little as possible."""
