"""Operations with a reference and fused implementations behind one interface."""
