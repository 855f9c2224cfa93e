"""Operations with more than one implementation: a torch reference, faster backends beside it."""
