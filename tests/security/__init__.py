"""What SECURITY.md promises, sentence by sentence: other users, other containers, hostile files and peers."""
