"""Operations with several implementations: a torch reference and faster backends."""
